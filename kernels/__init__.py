"""Pure tensor functions, each with a plain reference beside it. No configuration, no models."""
