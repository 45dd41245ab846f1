"""The REST routes, a module for each area."""
