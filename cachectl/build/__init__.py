"""Building entries: a launcher that starts rank processes, what a rank process does and records, and the gates.

torch is imported in rank processes only (`worker` and what it imports); the launcher and the job document are light.
"""
