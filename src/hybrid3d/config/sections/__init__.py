"""The sections of a recipe, setting by setting.

A setting is one annotated field: its name, type, range, default and meaning stand there and nowhere else;
`docs/recipe.md` is made of them.
"""
