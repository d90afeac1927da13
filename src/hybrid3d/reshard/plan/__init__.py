"""Which rank sends what to whom: boxes, layouts, routes, plans, and the proof that they cover every element."""
