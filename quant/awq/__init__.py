"""AWQ, as AutoAWQ and the tools that follow it store it: four bits in one of four orders."""
