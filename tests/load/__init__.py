"""Load tests: scripts run by hand, too long for every run of the suite (`make load`).

`soak` loads a server and looks at what is left of it; `equivalence` compares requests served
together with the same ones alone; `recorded` compares the answers of two checkouts.
"""
