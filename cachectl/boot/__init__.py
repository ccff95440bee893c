"""What runs at every start: the hook, the hand-out it lays down, and the checks in the program's own process.

Standard library only. Nothing here writes to a store, raises into a boot, or imports torch: the program imported it.
"""
