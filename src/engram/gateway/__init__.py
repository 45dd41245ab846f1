"""Policy and coordination between an agent and its memory. Holds no SQL: it uses the logbook's."""
