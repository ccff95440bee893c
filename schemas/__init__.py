"""The documents cachectl writes and reads, and the tables of its database.

`canonical`, `keying`, `envelope` and `boot` import the standard library only: the boot path reads with them. `recipe`,
`key`, `entry`, `report` and their common `fields` (pydantic) and `tables` (SQLAlchemy) belong to the command line and
the services.
"""
