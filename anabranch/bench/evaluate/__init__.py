"""Accuracy on multiple-choice questions, in process or over an OpenAI endpoint."""
