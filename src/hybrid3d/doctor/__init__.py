"""What `hybrid3d doctor [RECIPE]` examines: this machine, and whether a recipe's run can start on it."""
