"""The reward for mathematical answers: reading an answer, and deciding whether two are equal."""
