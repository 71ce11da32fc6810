"""Static pages, as one HTML file that needs no network and no other file.

A page is a title and sections; a section holds key figures, tables, charts, notes and viewers
(`page_parts`). `html_page` turns it into bytes: all data as JSON in a script element that no
browser runs, a fixed script that builds the document with `textContent`, Chart.js, and a content
security policy that allows nothing else. Both programs write their pages with it.
"""
