"""What `hybrid3d doctor [RECIPE]` examines: this machine, and whether a recipe's run can start on it.

`gpu/` is `hybrid3d doctor --gpu`: small checks of what a GPU and its packages do.
"""
