"""The package is pure Python; pyproject.toml has the rest."""

from setuptools import setup

setup()
