"""The only place that turns settings into services: a module for each process, so that each imports only its own."""
