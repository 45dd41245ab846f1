"""Text into tokens. Used wherever engram searches words; knows no database."""
