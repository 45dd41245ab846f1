"""Documents in: tasks with a lease, a queue that can be rebuilt from them, and what a worker does with them."""
