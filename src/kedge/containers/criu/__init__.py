"""CRIU: its command, its images, its log and what its errors mean."""
