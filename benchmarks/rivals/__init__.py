"""Other queues, each draining the same number of no-op jobs with its own best settings.

Each script runs in an environment of its own (`make bench` makes it under
`.bench/`), takes a DSN and a number of jobs, and prints jobs per second.
"""
