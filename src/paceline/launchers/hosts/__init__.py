"""HOW are tasks started on several hosts? Over the system's ssh: asked beforehand, an agent on each, one run folder."""
