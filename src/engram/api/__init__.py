"""The HTTP surface: guards, errors, tools over MCP and REST. Decides nothing itself."""
