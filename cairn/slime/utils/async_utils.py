"""Coroutines in plain functions."""

from asyncio import run as run
