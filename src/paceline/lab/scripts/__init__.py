"""WHAT runs while the lab looks on? The programs of the cells and scenarios, and the shapes in which they tell."""
