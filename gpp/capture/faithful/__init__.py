"""A captured model beside the user's own module: `compared` runs both."""
