"""`ditmesh plan`: the time of a step on given hardware, from what one rank's program does, and the memory beside it."""
