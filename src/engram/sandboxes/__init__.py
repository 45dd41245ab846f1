"""Sandboxes: places of their own in which an agent's commands run, made once for each request."""
