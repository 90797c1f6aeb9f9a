"""The report: reads records, and writes charts, pages and notebook output. Never imports torch."""
