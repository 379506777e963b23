"""Draws a dashboard without a Grafana: one self-contained page, made of what a Prometheus says
now.
"""

from kdist.dashboards.preview.html import render_dashboard

__all__ = ["render_dashboard"]
