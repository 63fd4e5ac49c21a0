"""Plots as SVG text: static, styled by the page's own classes and variables, so they follow light and dark."""
