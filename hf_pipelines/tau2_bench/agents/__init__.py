"""Agents: scripts, chat models on this machine or behind an endpoint, and the player that holds a chat model."""
