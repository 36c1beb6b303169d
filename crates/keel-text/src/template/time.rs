//! `strftime` for the dates that chat templates print, in UTC and English.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A point in time in the Gregorian calendar.
struct Moment {
    year: i64,
    /// From 0.
    month: usize,
    /// From 1.
    day: i64,
    /// From 1.
    day_of_year: i64,
    /// From 0 for Sunday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

/// A time in UTC as RFC 3339 writes it, in whole seconds: `2026-11-28T20:37:58Z`.
pub fn date_and_time(time: SystemTime) -> String {
    let Moment { year, month, day, hour, minute, second, .. } = Moment::at(time);
    format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", month + 1)
}

/// Formats a time in UTC as C's `strftime` does. The error names a directive that is not known.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, String> {
    let moment = Moment::at(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('-') => {
                let number = chars.next().and_then(|directive| moment.field(directive));
                let number = number.ok_or_else(|| unknown(format))?;
                let unpadded = number.trim_start_matches(['0', ' ']);
                out.push_str(if unpadded.is_empty() { "0" } else { unpadded });
            }
            Some('%') => out.push('%'),
            Some(directive) => out.push_str(&moment.field(directive).ok_or_else(|| unknown(format))?),
            None => return Err(unknown(format)),
        }
    }
    Ok(out)
}

fn unknown(format: &str) -> String {
    format!("strftime_now: {format:?} has a directive that is not known")
}

impl Moment {
    fn at(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(since) => since.as_secs() as i64,
            Err(before) => -(before.duration().as_secs() as i64),
        };
        let (days, second_of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // The calendar repeats every 400 years. Counting from 1 March puts the leap day last.
        let days_from_march = days + 719_468;
        let (era, day_of_era) = (days_from_march.div_euclid(146_097), days_from_march.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // From March on, the lengths of months repeat as 31, 30, 31, 30, 31 days: 153 days for five months.
        let month_from_march = (5 * day_from_march + 2) / 153;
        let month = (month_from_march + 2) % 12;
        let year = era * 400 + year_of_era + i64::from(month < 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year =
            if month < 2 { day_from_march - 305 } else { day_from_march + 60 + i64::from(is_leap) };
        Moment {
            year,
            month: month as usize,
            day: day_from_march - (153 * month_from_march + 2) / 5 + 1,
            day_of_year,
            // 1 January 1970 was a Thursday.
            weekday: (days + 4).rem_euclid(7) as usize,
            hour: second_of_day / 3_600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    fn field(&self, directive: char) -> Option<String> {
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month + 1),
            'B' => MONTHS[self.month].to_string(),
            'b' => MONTHS[self.month][..3].to_string(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'A' => WEEKDAYS[self.weekday].to_string(),
            'a' => WEEKDAYS[self.weekday][..3].to_string(),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{:02}", (self.hour + 11) % 12 + 1),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_string(),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_string(),
            'z' => "+0000".to_string(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Expected strings are Python's `datetime.fromtimestamp(t, UTC).strftime(...)`.
    #[test]
    fn dates_agree_with_python() {
        let all = "%Y-%m-%d %j %a %A %b %B %y %H:%M:%S %I%p %e %-d %-m %-H %F %T %%";
        let cases = [
            (0, "1970-01-01 001 Thu Thursday Jan January 70 00:00:00 12AM  1 1 1 0 1970-01-01 00:00:00 %"),
            (
                951_782_399,
                "2000-02-28 059 Mon Monday Feb February 00 23:59:59 11PM 28 28 2 23 2000-02-28 23:59:59 %",
            ),
            (
                951_782_400,
                "2000-02-29 060 Tue Tuesday Feb February 00 00:00:00 12AM 29 29 2 0 2000-02-29 00:00:00 %",
            ),
            (
                951_868_800,
                "2000-03-01 061 Wed Wednesday Mar March 00 00:00:00 12AM  1 1 3 0 2000-03-01 00:00:00 %",
            ),
            (
                1_798_718_399,
                "2026-12-31 365 Thu Thursday Dec December 26 11:59:59 11AM 31 31 12 11 2026-12-31 11:59:59 %",
            ),
            (
                4_107_585_600,
                "2100-03-01 060 Mon Monday Mar March 00 12:00:00 12PM  1 1 3 12 2100-03-01 12:00:00 %",
            ),
        ];
        for (seconds, expected) in cases {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(time, all).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn unknown_directives_are_named() {
        for format in ["%Q", "100%", "%-", "%-Q"] {
            let err = strftime(UNIX_EPOCH, format).unwrap_err();
            assert_eq!(err, format!("strftime_now: {format:?} has a directive that is not known"));
        }
    }

    #[test]
    fn times_are_written_by_rfc_3339() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
        ] {
            assert_eq!(date_and_time(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
