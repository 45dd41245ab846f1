"""The schema of engram's database, as numbered migrations.

`schema.sql` beside them is the same schema written to be read; a test proves
the two equal. A migration that has been released is never edited.
"""
