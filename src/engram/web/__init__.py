"""ASGI pieces that every HTTP server of engram shares. Knows no domain."""
