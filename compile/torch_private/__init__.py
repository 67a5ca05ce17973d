"""The one seam to private torch API."""
