"""`hybrid3d plan`: traffic, seconds and memory of a recipe, from the engines' own code and without starting ranks."""
