"""``ncclpy trace``: what is stuck and which rank it waits for, from the recorder's dumps of one or more processes.

`command` has the arguments and calls the other modules. `reading` finds the files, and `dump` reads each into a
`table`. `stuck`, `divergence` and `crossing` find what is wrong, and `report` writes it as text. `timeline` makes
spans for a trace viewer and for `picture`. No module here loads NCCL, so dumps can be read on any machine.
"""
