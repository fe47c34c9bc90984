"""``ncclpy trace``: what is stuck and on whom it waits, from the recorder's dumps of one or more processes.

`reading` finds the files, `dump` reads one into a `table`, `stuck`, `parting` and
`crossing` judge, `report` says it in words, `reasons` each only once,
`timeline` gives the times to a trace viewer and to `picture`; `command` is what the command line calls.
Nothing here loads NCCL, so dumps can be read on any machine.
"""
