"""The store: where artifacts, entry manifests and boot records lie, and the database over them.

`layout`, `blobs`, `records` and `reading` import the standard library only and never write into a store that is only
read; `writing` publishes, `locks` keeps two builders apart, `engine` and `manifest` hold all SQL.
"""
