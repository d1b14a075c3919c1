"""Where code written against InfiniLM looks for its extension module."""
