"""What an artifact is valid for: one module a key part, each giving a document with a digest.

Standard library only: the same code computes the parts in the hook, in a rank process and in the program.
"""
