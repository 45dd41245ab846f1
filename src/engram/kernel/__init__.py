"""What everything else rests on: errors, settings, time, chance, states, logs.

The kernel performs no network or database work and imports nothing of ours.
"""
