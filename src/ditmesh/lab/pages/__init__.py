"""Pages of the instruments: charts as SVG, images, files, and one HTML file that holds them."""
