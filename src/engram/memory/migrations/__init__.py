"""The numbered schema files of the memory server's own database."""
