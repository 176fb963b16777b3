EXCLUDED_CONDITIONS = ("inference_mode",)  # and not autocast: functions compute in dtypes of their own
WIDE_OUTPUTS = False  # unless a scheme or its file says so
