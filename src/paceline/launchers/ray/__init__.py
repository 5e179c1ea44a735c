"""HOW are tasks started on a Ray cluster? One actor a task, in a placement group; tensors never travel through Ray."""
