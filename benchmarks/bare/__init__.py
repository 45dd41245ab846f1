"""The other side of each ratio: scripts of at most 60 lines with the same commits and libraries."""
