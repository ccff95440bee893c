"""What differs between compile runtimes: how each is called, where it wants its files, how it loads them.

An adapter answers boot.instrument.Runtime. None of these modules imports torch when it is imported: they run in the
program's process, where torch is loaded, and look it up when they are used.
"""
