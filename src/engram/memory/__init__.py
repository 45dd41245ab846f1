"""The embedded memory server: it stands in for somebody else's OpenMemory.

It runs in its own process, on its own database, and is spoken to over HTTP
alone, so that it can be killed under a running gateway and replaced by a real
OpenMemory by changing one URL. It must never import what talks to it.
"""
