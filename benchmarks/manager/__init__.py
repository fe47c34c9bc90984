"""What the Manager costs."""
