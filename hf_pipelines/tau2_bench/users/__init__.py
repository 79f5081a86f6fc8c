"""Customers: a scripted one, one that fills slots, one that is a language model, and the audit of what they say."""
