"""Answers that an agent of the user's makes: it calls an OpenAI-compatible endpoint of a rank that generates."""
