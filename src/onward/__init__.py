"""Onward."""
