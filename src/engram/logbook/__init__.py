"""The durable primitives: outbox, audit, memories. Facts and rules of rows, no policy.

Each module has its statements in the `.sql` file of the same name. Functions
that return a `Query` are pure; the public functions of the specification run
them synchronously, and the servers run the same values asynchronously.
"""
