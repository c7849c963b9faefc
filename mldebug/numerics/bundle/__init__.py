"""An event as a folder of files, with a program that shows it again."""
